"""For all tests: interrupts that can be felt."""

import signal

# A shell that starts a command in the background lets it ignore SIGINT, and its children inherit that: what tests
# Ctrl-C would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
