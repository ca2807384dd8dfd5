"""The addresses of the API; what they share is in ``parameters``."""
