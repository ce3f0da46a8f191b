"""What a frozen network computes between its matrix products: Triton kernels, and plain torch."""
