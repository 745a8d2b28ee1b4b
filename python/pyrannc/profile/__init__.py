"""What Blocks and links cost, measured on the devices that will run them."""
