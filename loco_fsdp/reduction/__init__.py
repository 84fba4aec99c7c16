"""What happens to a gradient on its way to other ranks. Knows no framework that trains."""
