"""How a vector reaches a peer: torch.distributed, or authenticated links."""
