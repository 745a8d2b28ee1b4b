"""What this machine can do, measured for the cost model."""
