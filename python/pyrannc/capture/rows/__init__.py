"""What calls do to the rows of the batch: whether each is treated by itself, and which numbers of them there may be."""
