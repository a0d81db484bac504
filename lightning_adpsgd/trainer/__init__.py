"""What Lightning's Trainer does that needs care under gossip, or is refused."""
