"""Process lifecycle of a rank: how it joins the others (`join`), watches them (`watch`), ends (`end`), and logs."""
