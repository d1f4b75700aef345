"""The kernels compiled by numba, for fp32 on the CPU (some also for fp64).

Tensors are passed by address. The modules named as a kernel import numba and compile at once; `dispatch`
imports them when they are first needed.
"""
