//! Authorization: the token, and the rules that keep web pages out.

use std::net::IpAddr;

use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use axum::http::{HeaderMap, Method};

use super::access::AdminCredentials;
use super::problem::AdminError;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Needs {
    Nothing,
    /// Any token, also one that only reads.
    ReadToken,
    Token,
}

impl Needs {
    pub(super) fn of(path: &str) -> Self {
        match path {
            "/" | "/healthz" | "/readyz" => Self::Nothing,
            "/metrics" | "/stats" => Self::ReadToken,
            _ => Self::Token,
        }
    }
}

pub(super) fn check(
    credentials: &AdminCredentials,
    method: &Method,
    headers: &HeaderMap,
    needs: Needs,
) -> Result<(), AdminError> {
    match &credentials.all {
        Some(all) if needs != Needs::Nothing => {
            let given = headers.get(AUTHORIZATION).map_or(&[][..], |value| value.as_bytes());
            let given = if is_bearer(given) { given[BEARER.len()..].trim_ascii() } else { &[] };
            let reads = credentials.read.as_ref().is_some_and(|read| read.accept(given));
            match all.accept(given) {
                true => {}
                false if reads && needs == Needs::ReadToken => {}
                false if reads => {
                    return Err(AdminError::Forbidden(
                        "this token only reads /metrics and /stats".to_owned(),
                    ));
                }
                false => return Err(AdminError::Unauthorized),
            }
        }
        Some(_) => {}
        None => check_host(headers)?,
    }
    if method == Method::POST && !is_json(headers) {
        return Err(AdminError::ContentType);
    }
    Ok(())
}

const BEARER: &[u8] = b"Bearer ";

fn is_bearer(given: &[u8]) -> bool {
    given.len() > BEARER.len() && given[..BEARER.len()].eq_ignore_ascii_case(BEARER)
}

/// Refuses other host names, by which a web page could reach the loopback.
fn check_host(headers: &HeaderMap) -> Result<(), AdminError> {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    if name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    Err(AdminError::Forbidden(
        "without a token, this interface must be called by an IP address or as localhost".to_owned(),
    ))
}

fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}
