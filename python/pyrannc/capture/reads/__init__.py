"""What a call reads and leaves beside tensors, as data that later calls are held against."""
