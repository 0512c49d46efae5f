"""Messages and files between the processes of one host."""
