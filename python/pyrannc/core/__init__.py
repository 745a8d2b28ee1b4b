"""What the native core decides and says, as typed data."""
