"""Tables and plots of the documents, made from the files of raw results only."""
