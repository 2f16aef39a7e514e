"""The CPU's own kernels: C++ beside ctypes, compiled at first use for the machine at hand."""
