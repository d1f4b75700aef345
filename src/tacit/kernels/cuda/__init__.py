"""The hot loops as Triton kernels, for CUDA tensors of fp32: each gives the bits of its reference on the CPU.

Nothing here is imported until a tensor asks for it (see `pick`). The kernels have run in Triton's interpreter
and been compiled for CUDA; none of them has run on a GPU yet.

Sums that payloads depend on are added up in the order of the references. Nothing is fused or approximated:
kernels are launched without fused multiply-add, and divide and take roots with correct rounding.
"""
