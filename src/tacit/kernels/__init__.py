"""The hot loops of compressors: one kernel a module, and its versions in three folders, with the same bits.

`reference` is plain torch, on any device; `numba` is compiled for the CPU, `triton` for CUDA. The modules
here check their arguments and call one of the three; `dispatch` decides which.
"""
