"""The kernels for CUDA tensors, by Triton: each gives the bits of its reference on the CPU.

Most take fp32, bf16 and fp16; they compute in fp32, and round wherever the references do. The host waits for
none of them, except for `select.select_reaching`. Gram-Schmidt alone adds in another order.

Nothing here is imported until a tensor asks for it (see `dispatch`). The tests run all kernels in Triton's
interpreter and compile them for CUDA, and run them on a GPU where torch sees one.

Sums that payloads depend on are added up in the order of the references. Nothing is fused or approximated:
kernels are launched without fused multiply-add, and divide and take roots with correct rounding.
"""
