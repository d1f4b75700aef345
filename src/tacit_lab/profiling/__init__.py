"""Where the processor time of a training goes: by thread, by stage of an exchange, by cause.

The clock of each thread is exact, and so are the times of stages; the causes within a stage are shares of
samples that the kernel takes. So all rows of a thread add up to its processor time.
"""
