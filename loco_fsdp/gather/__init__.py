"""What happens to parameters on their way to other ranks. Knows no framework."""
