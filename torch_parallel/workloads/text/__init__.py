"""Text: to be classified, to be predicted byte by byte or token by token, or hidden in part and found again.

Each loader gives a `TextData`, tokenised once, in the process that starts the workers.
"""
