"""Laws: how a ladder's losses become the loss of a larger run. One law a file, behind one protocol."""
