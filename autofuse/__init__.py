"""autofuse: one line makes a PyTorch training loop faster, and says what it did."""
