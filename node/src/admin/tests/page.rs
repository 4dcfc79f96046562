use std::collections::BTreeSet;

use super::super::page::PAGE;
use super::super::routes::ROUTES;
use super::*;

/// Returns the texts between a prefix and a quotation mark.
fn quoted<'a>(begin: &'a str, mark: char) -> impl Iterator<Item = &'static str> + 'a {
    PAGE.split(begin).skip(1).filter_map(move |rest| rest.split(mark).next())
}

#[tokio::test]
async fn the_page_is_public_and_restricted() {
    for token in [None, Some(TOKEN)] {
        let served = Served::start(token, Limits::default());
        let answer = served.raw("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        assert_eq!(body, PAGE);
        for line in [
            "content-type: text/html; charset=utf-8",
            "cache-control: no-store",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "x-frame-options: DENY",
        ] {
            assert!(head.lines().any(|other| other == line), "{line} is not in {head}");
        }
        let policy = head.lines().find_map(|line| line.strip_prefix("content-security-policy: ")).unwrap();
        assert!(
            policy.starts_with("default-src 'none'; img-src 'self' data:; connect-src 'self'; "),
            "{policy}"
        );
        assert!(policy.contains("script-src 'sha256-") && policy.contains("style-src 'sha256-"), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
        served.stop().await;
    }
    // What the page reads is not public.
    let served = Served::start(Some(TOKEN), Limits::default());
    for line in ["GET /events", "GET /stats", "POST /defrag"] {
        served.refuses(line, JSON, "", 401, "unauthorized").await;
    }
    served.stop().await;
}

#[test]
fn the_page_names_routes_that_exist_and_no_other_host() {
    let is_local = |place: &&str| !place.starts_with(['#', '$']) && !place.starts_with("data:");
    let named: BTreeSet<_> = quoted("href=\"", '"')
        .chain(quoted("src=\"", '"'))
        .chain(quoted("fetch('", '\''))
        .filter(is_local)
        .map(|place| format!("/{place}"))
        .collect();
    for path in &named {
        assert!(ROUTES.iter().any(|(_, route)| route == path), "{path} is no route");
    }
    for path in ["/events", "/stats", "/healthz", "/defrag", "/map.svg"] {
        assert!(named.contains(path), "{path} is not in {named:?}");
    }
    let rest = PAGE.replace("http://www.w3.org/2000/svg", "");
    for other in ["http:", "https:", "src=\"//", "href=\"//", "url(", "@import"] {
        assert!(!rest.contains(other), "{other}");
    }
    // The policy would block them.
    for blocked in [" style=", "{ style:", " onclick=", "innerHTML", "eval("] {
        assert!(!PAGE.contains(blocked), "{blocked}");
    }
}
