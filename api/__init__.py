"""What people and programs outside the stream processor use: the command line and, later, HTTP and the dashboard."""
