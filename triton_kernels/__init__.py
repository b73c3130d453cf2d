"""Fused kernels: one operation per file, beside its plain torch reference. Imported as `memwall.triton_kernels`."""
