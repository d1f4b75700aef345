"""The hot loops as Triton kernels, for CUDA tensors: each gives the bits of its reference on the CPU.

Most take fp32, bf16 and fp16; they count in fp32, and round wherever the references do. The host waits for
none of them, but for the pass that finds what reaches a threshold. Gram-Schmidt alone adds in another order.

Nothing here is imported until a tensor asks for it (see `pick`). The tests run all kernels in Triton's
interpreter and compile them for CUDA, and run them on a GPU where torch sees one.

Sums that payloads depend on are added up in the order of the references. Nothing is fused or approximated:
kernels are launched without fused multiply-add, and divide and take roots with correct rounding.
"""
