"""What the Ascend compiler makes of a Triton kernel, on any machine; it knows no kernel but what a case declares."""
