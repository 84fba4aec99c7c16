"""Triton kernels of the codec of loco-fsdp, one file a kernel."""
