"""The hot loops of compressors: one kernel a module, and its versions in three folders, with the same bits.

`reference` is plain torch, on any device; `numba` is compiled for the CPU, `triton` for CUDA. The modules
here say what each kernel computes, and make it a row of the table in `dispatch`, which calls one of them.
"""
