"""The C++ kernels: paged attention, matrix products and a whole decoder in one call."""
