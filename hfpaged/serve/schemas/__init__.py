"""What comes in, as pydantic models: a file for each family of endpoints."""
