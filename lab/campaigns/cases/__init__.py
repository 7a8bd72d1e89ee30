"""Cases that the gate leaves out, since another stands for their mechanism; `lab.campaigns.matrices` runs them."""
