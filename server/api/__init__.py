"""The HTTP side: one router each for completions, chats, operations and speculation, and what
requests pass on their way there and back."""
