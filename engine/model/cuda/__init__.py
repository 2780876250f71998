"""Models on a GPU: Triton kernels, a runner over static buffers, and what plans their memory.

Nothing here is imported unless a model is to run on it, so servers on CPUs need no Triton. On CPU
tensors the kernels run in Triton's interpreter: slow, but the same arithmetic, which is how all of
this is tested without a GPU.
"""
