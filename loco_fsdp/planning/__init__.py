"""What reducing in low bits is worth on a cluster: measured rates, and what follows from them."""
