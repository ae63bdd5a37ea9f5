"""Drop-ins for other libraries' models and trainers. Each module needs the library that it is named after."""
