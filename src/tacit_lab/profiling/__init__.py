"""Where the processor time of a training goes: by thread, and by stage of an exchange.

The clock of each thread is exact, and so are the times of stages, so all rows of a thread add up to its
processor time. Which functions take it within a stage is for perf or py-spy to say.
"""
