"""Where parameters and gradients lie, and who owns them."""
