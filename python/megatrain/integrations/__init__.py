"""Other people's training loops over a streamed model. Each file needs the package it is named after."""
