"""Declarations for kernels of other projects: argument types and constants only, nothing of their code."""
