"""What a model's code is made of for Python: where it stands, and what its objects are and hold."""
