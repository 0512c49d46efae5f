"""Messages from one rank to another: sent, matched in order at the receiver's daemon, and moved. No I/O."""
