"""This process among the others of the job."""
