"""A corpus in the shape of Switchboard and Hub5'00, spoken by a synthesiser."""
