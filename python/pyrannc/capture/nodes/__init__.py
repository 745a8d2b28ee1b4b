"""What is known of the nodes of a trace, and how operators run in it."""
