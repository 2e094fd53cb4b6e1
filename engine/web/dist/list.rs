&[
    ("index.html", "text/html; charset=utf-8", include_bytes!("index.html.gz")),
]
