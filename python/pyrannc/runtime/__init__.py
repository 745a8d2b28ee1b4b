"""The runtime: carries out a Plan, step by step, with torch and torch.distributed."""
