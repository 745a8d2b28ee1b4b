"""From the configuration and the machine to a Plan."""
