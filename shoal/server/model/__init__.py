"""What a server holds of one model, and what it does with pushes."""
