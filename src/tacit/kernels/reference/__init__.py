"""The kernels in plain torch, for any device and type: what the compiled versions have to equal, bit for bit.

On CUDA some differ in the last bit, as torch multiplies by the inverse of a scalar: compare with the CPU.
"""
