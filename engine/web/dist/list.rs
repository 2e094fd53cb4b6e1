&[
    ("assets/app.css", "text/css; charset=utf-8", include_bytes!("assets/app.css.gz")),
    ("assets/app.js", "text/javascript; charset=utf-8", include_bytes!("assets/app.js.gz")),
    ("favicon.svg", "image/svg+xml", include_bytes!("favicon.svg.gz")),
    ("index.html", "text/html; charset=utf-8", include_bytes!("index.html.gz")),
    ("licences.txt", "text/plain; charset=utf-8", include_bytes!("licences.txt.gz")),
]
