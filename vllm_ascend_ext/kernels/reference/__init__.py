"""What each sampler operation means, in plain PyTorch; must never know a kernel or how it computes.

Written from the definitions, in float64 where rounding could decide, for clarity and not for speed: they loop over rows
and read tensors on the host. Arguments are taken as checked. Each module has the name of the operation's kernel file.
"""
