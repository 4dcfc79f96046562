use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use kvpool_map::{Picture, draw};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tracing::Instrument;

use crate::metrics::CONTENT_TYPE as CONTENT_TYPE_OF_METRICS;

use super::access::AdminAccess;
use super::apart::apart;
use super::api::HealthState;
use super::connections::ConnectionPermit;
use super::events::{CELLS_MAX, Hub};
use super::guard::{self, Needs};
use super::interface::Admin;
use super::limits::Limits;
use super::page::{self, PAGE};
use super::problem::AdminError;

#[derive(Clone)]
pub(super) struct Shared {
    pub admin: Arc<dyn Admin>,
    pub access: AdminAccess,
    pub limits: Limits,
    pub hub: Arc<Hub>,
}

macro_rules! routes {
    ($($method:ident $path:literal => $handler:ident;)*) => {
        #[cfg(test)]
        pub(super) const ROUTES: &[(&str, &str)] = &[$((stringify!($method), $path)),*];

        fn routes() -> Router<Shared> {
            Router::new()$(.route($path, $method($handler)))*
        }
    };
}

routes! {
    get "/" => page;
    get "/healthz" => health;
    get "/readyz" => ready;
    get "/stats" => stats;
    get "/metrics" => metrics;
    get "/map.svg" => map;
    get "/owners" => owners;
    get "/history" => history;
    get "/sequences" => sequences;
    get "/migrations" => migrations;
    get "/topology" => topology;
    get "/events" => events;
    get "/openapi.json" => openapi;
    post "/defrag" => defrag;
    post "/resize" => resize;
    post "/migrate" => migrate;
    post "/declare-ended" => declare_ended;
    post "/trim" => trim;
    post "/hints" => hints;
    post "/audit" => audit;
}

pub(super) const OPENAPI: &str = include_str!("openapi.json");

/// Default number of owners listed.
const OWNERS: usize = 1000;

const CELL_SEQUENCES: usize = 16;

/// Most characters of a path in a span: more than any route has.
const SPAN_PATH_CHARS: usize = 64;

/// Returns the routes, with the checks and limits of every request.
pub(super) fn router(shared: Shared) -> Router {
    routes()
        .fallback(async |request: Request| {
            AdminError::NotFound(format!("there is no route {}", request.uri().path()))
        })
        .method_not_allowed_fallback(async |request: Request| {
            AdminError::Method(format!("{} does not answer to {}", request.uri().path(), request.method()))
        })
        .layer(middleware::from_fn_with_state(shared.clone(), admit))
        .with_state(shared)
}

/// Returns the routes for callers beyond the connection limit: only the node's state.
pub(super) fn refusals(shared: Shared) -> Router {
    let connections = shared.limits.connections;
    let busy = async move || AdminError::Busy { connections };
    Router::new()
        .route("/healthz", get(health))
        .route("/readyz", get(ready))
        .fallback(busy)
        .with_state(shared)
}

/// Answers a request within a span.
async fn admit(State(at): State<Shared>, request: Request, next: Next) -> Response {
    use tracing::field::Empty;
    let (method, path) = (request.method(), request.uri().path());
    // Untrusted text is bounded before it is recorded.
    let path: String = path.chars().take(SPAN_PATH_CHARS).collect();
    let span = tracing::info_span!(
        parent: None,
        "kvpool.admin",
        otel.name = format!("{method} {path}"),
        otel.kind = "server",
        otel.status_code = Empty,
        http.request.method = %method,
        url.path = path,
        http.response.status_code = Empty,
    );
    let response = admit_within(at, request, next).instrument(span.clone()).await;
    let status = response.status();
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
    response
}

/// Checks authorization, and bounds the time of the answer.
async fn admit_within(at: Shared, request: Request, next: Next) -> Response {
    let needs = Needs::of(request.uri().path());
    if let Err(error) = guard::check(&at.access.credentials(), request.method(), request.headers(), needs) {
        return error.into_response();
    }
    // The others have a body, which the caller may send slowly.
    if request.method() == Method::GET {
        read_as_a_whole(request.extensions().get());
    }
    match timeout(at.limits.answer, next.run(request)).await {
        Ok(response) => response,
        Err(_) => AdminError::Timeout(format!("no answer within {:?}", at.limits.answer)).into_response(),
    }
}

async fn page() -> Response {
    let mut response = answer(StatusCode::OK, "text/html; charset=utf-8", PAGE);
    page::restrict(response.headers_mut());
    response
}

async fn health(State(at): State<Shared>) -> Response {
    let health = at.admin.health();
    let is_ok = health.state == HealthState::Ok;
    let status = if is_ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, json(&health)).into_response()
}

async fn ready(State(at): State<Shared>) -> Response {
    let readiness = at.admin.ready();
    let status = if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, json(&readiness)).into_response()
}

async fn metrics(State(at): State<Shared>) -> Result<Response, AdminError> {
    let text = at.admin.scrape().await?.encode(&at.admin.health().node);
    Ok(answer(StatusCode::OK, CONTENT_TYPE_OF_METRICS, text))
}

async fn map(State(at): State<Shared>) -> Result<Response, AdminError> {
    let snapshot = at.admin.snapshot().await?;
    let (title, notes) = (at.admin.health().node, vec![format!("{} frames.", snapshot.frames().len())]);
    let picture = move || {
        let panels = vec![("Now", &snapshot)];
        draw(&Picture { title, notes, panels, groups: Vec::new() })
    };
    let picture = apart(picture).await?;
    Ok(answer(StatusCode::OK, "image/svg+xml", picture))
}

async fn owners(State(at): State<Shared>, request: Request) -> Result<Response, AdminError> {
    let limit = match request.uri().query() {
        None => OWNERS,
        Some(query) => {
            query.strip_prefix("limit=").and_then(|limit| limit.parse().ok()).ok_or_else(|| {
                AdminError::BadRequest("the only parameter is limit=N, a whole number of owners".to_owned())
            })?
        }
    };
    Ok(json(&at.admin.owners(limit).await?))
}

async fn history(State(at): State<Shared>) -> Response {
    json(&at.hub.history())
}

async fn sequences(State(at): State<Shared>) -> Result<Response, AdminError> {
    let snapshot = at.admin.sequences().await?;
    // As text: numbers of a browser have 53 bits.
    let ids: Vec<_> = snapshot.sequences().iter().map(|id| id.0.to_string()).collect();
    let cells = apart(move || kvpool_map::sequences(&snapshot, CELLS_MAX, CELL_SEQUENCES)).await?;
    Ok(json(&serde_json::json!({ "sequences": ids, "cells": cells })))
}

async fn topology(State(at): State<Shared>) -> Result<Response, AdminError> {
    Ok(json(&at.admin.topology().await?))
}

async fn events(State(at): State<Shared>, request: Request) -> Result<Response, AdminError> {
    let last = request.headers().get("last-event-id").and_then(|id| id.to_str().ok());
    Ok(at.hub.follow(last, request.extensions().get().cloned())?.into_response())
}

async fn openapi() -> Response {
    answer(StatusCode::OK, "application/json", OPENAPI)
}

async fn trim(State(at): State<Shared>, request: Request) -> Result<Response, AdminError> {
    let order = body(&at, request).await?;
    Ok(json(&at.admin.trim(order).await?))
}

async fn stats(State(at): State<Shared>) -> Result<Response, AdminError> {
    Ok(json(&at.admin.stats().await?))
}

async fn migrations(State(at): State<Shared>) -> Result<Response, AdminError> {
    Ok(json(&at.admin.migrations().await?))
}

async fn defrag(State(at): State<Shared>, request: Request) -> Result<Response, AdminError> {
    nothing(&at, request).await?;
    Ok(json(&at.admin.defragment().await?))
}

async fn resize(State(at): State<Shared>, request: Request) -> Result<Response, AdminError> {
    let order = body(&at, request).await?;
    Ok(json(&at.admin.resize(order).await?))
}

async fn migrate(State(at): State<Shared>, request: Request) -> Result<Response, AdminError> {
    let order = body(&at, request).await?;
    Ok((StatusCode::ACCEPTED, json(&at.admin.migrate(order).await?)).into_response())
}

async fn declare_ended(State(at): State<Shared>, request: Request) -> Result<Response, AdminError> {
    let order = body(&at, request).await?;
    Ok(json(&at.admin.declare_ended(order).await?))
}

async fn hints(State(at): State<Shared>, request: Request) -> Result<Response, AdminError> {
    let envelope = body(&at, request).await?;
    Ok(json(&at.admin.hints(envelope).await?))
}

async fn audit(State(at): State<Shared>, request: Request) -> Result<Response, AdminError> {
    nothing(&at, request).await?;
    Ok(json(&at.admin.audit().await?))
}

async fn bytes(at: &Shared, request: Request) -> Result<Vec<u8>, AdminError> {
    let max = at.limits.body_bytes;
    let (parts, body) = request.into_parts();
    match timeout(at.limits.body, Limited::new(body, max).collect()).await {
        Ok(Ok(body)) => {
            read_as_a_whole(parts.extensions.get());
            Ok(body.to_bytes().into())
        }
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(AdminError::TooLarge { max }),
        Ok(Err(error)) => Err(AdminError::BadRequest(format!("reading the body: {error}"))),
        Err(_) => Err(AdminError::Timeout(format!("no body within {:?}", at.limits.body))),
    }
}

fn read_as_a_whole(permit: Option<&Arc<ConnectionPermit>>) {
    if let Some(permit) = permit {
        permit.answering();
    }
}

async fn body<T: DeserializeOwned>(at: &Shared, request: Request) -> Result<T, AdminError> {
    let bytes = bytes(at, request).await?;
    serde_json::from_slice(&bytes).map_err(|error| AdminError::Invalid(error.to_string()))
}

/// Reads the body of a request without parameters: empty, or `{}`.
async fn nothing(at: &Shared, request: Request) -> Result<(), AdminError> {
    match bytes(at, request).await?.trim_ascii() {
        b"" | b"{}" => Ok(()),
        _ => Err(AdminError::Invalid("this request has no parameters: the body must be {}".to_owned())),
    }
}

fn json(value: &impl Serialize) -> Response {
    typed(StatusCode::OK, "application/json", value)
}

fn typed(status: StatusCode, content_type: &'static str, value: &impl Serialize) -> Response {
    let (status, text) = match serde_json::to_vec(value) {
        Ok(text) => (status, text),
        Err(error) => {
            let problem = AdminError::Failed(format!("the answer has no form as JSON: {error}")).problem();
            (StatusCode::INTERNAL_SERVER_ERROR, serde_json::to_vec(&problem).unwrap_or_default())
        }
    };
    answer(status, content_type, text)
}

fn answer(status: StatusCode, content_type: &'static str, text: impl Into<Body>) -> Response {
    let mut response = Response::new(text.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        let problem = self.problem();
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = typed(status, "application/problem+json", &problem);
        let further = match self {
            Self::Unauthorized => Some((WWW_AUTHENTICATE, "Bearer")),
            // Most answers take less than a second.
            Self::Busy { .. } => Some((RETRY_AFTER, "1")),
            _ => None,
        };
        if let Some((name, value)) = further {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }
}
