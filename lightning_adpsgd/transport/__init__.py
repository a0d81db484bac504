"""How a vector reaches a peer: threads, torch.distributed, authenticated links."""
